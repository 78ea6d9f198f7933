"""The client of the HTTP service, as a planner.

the planner               client.RemoteShardingPlanner
its requests, repeated    retrying_http
"""
