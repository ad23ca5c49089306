"""Collectives of libraries; `specs` lists them, and nothing here is imported until one is bound."""
