"""Traced graphs as JSON documents and back, as data that runs no code.

a graph as JSON, and back         codec.write_graph, .read_graph
its fields and its schema         document
checks of a graph from outside    allowed_ops, decode, replay
"""
