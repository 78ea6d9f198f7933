"""Weights of sharded modules: read into shards from files, written from shards, without a full copy on any rank.

from a checkpoint into shards             load.load_weights
from shards to ``from_pretrained``        save.save_weights
files, folders and state dicts            sources
names and shapes, or one error            matching
transformers' names and conversions       pretrained, conversions
buffers that no checkpoint holds          unsaved_buffers
tensors read by slices                    lazy_tensors, local_shards
weights in 4 and 8 bits                   quantized
a folder that is replaced when whole      replaced_folder
"""
