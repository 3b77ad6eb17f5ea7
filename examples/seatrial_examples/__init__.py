"""What other packages can add to Seatrial, one small module each."""
