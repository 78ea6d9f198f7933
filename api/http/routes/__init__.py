"""The HTTP service's routes, one module a resource."""
