"""Packaging entry point; every fact is in setup.cfg."""

from setuptools import setup

setup()
