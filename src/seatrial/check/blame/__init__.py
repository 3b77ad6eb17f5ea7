"""Who is to blame, from measurements; and simulated clusters to try it on."""
