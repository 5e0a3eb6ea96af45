"""The operations a model's forward pass is made of, each with a torch reference.

Knows tensors only: no requests, no scheduling, no model.
"""
