"""A plan meets a module: names, layouts, groups and checks, resolved before anything is changed."""
