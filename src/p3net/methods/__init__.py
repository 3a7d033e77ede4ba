"""Ways to learn: a method owns the model and returns named, unweighted losses."""
