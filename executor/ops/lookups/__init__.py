"""Lookups in a table of embeddings that is sharded by rows or by columns.

a row for each index     embedding.embedding
a sum, mean or maximum   embedding_bag.embedding_bag
"""
