"""The interfaces of shardplan: the command line, the HTTP service and the client of that service."""
