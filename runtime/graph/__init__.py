"""From a model's own forward to compiled pieces between attention calls, and the runner that calls them."""
