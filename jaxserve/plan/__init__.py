"""What a model's step compiles to on a machine that nobody has at hand: `jaxserve plan`."""
