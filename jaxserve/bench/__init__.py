"""Load generators and roofline measurements: `jaxserve bench serve` and `jaxserve bench offline`."""
