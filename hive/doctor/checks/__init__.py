"""Checks of `hive doctor`, one module for each subject; doctor.py runs them."""
