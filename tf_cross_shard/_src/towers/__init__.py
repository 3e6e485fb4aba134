"""Towers: several copies of a model function in one program on one machine."""
