"""Model families in Flax NNX; each family owns its name table."""
