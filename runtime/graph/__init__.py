"""From a model's own forward to compiled pieces between attention calls: trace, rewrite, partition, unify, compile, run."""
