"""How shardplan is asked: the command line, the HTTP service and the client of that service."""
