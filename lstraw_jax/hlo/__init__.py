"""Compiled programs as text, and what a reader wants to know of them."""
