"""What `hive doctor` looks at, one module for each subject; doctor.py runs them."""
