"""Weights of sharded modules: read into shards from files, written from shards, without a full copy on any rank."""
