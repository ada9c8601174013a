"""Load generators and the fixed trace that all speed figures are measured on."""
