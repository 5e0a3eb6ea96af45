"""Loads the real engine and its text; imported and called on the engine thread.

Importing this module brings torch along, which takes seconds: /health answers in that time.
"""
