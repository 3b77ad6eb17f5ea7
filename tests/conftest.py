"""For all tests: how long an example takes says nothing on a machine that does other things too."""

from hypothesis import settings

settings.register_profile("seatrial", deadline=None)
settings.load_profile("seatrial")
