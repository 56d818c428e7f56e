"""This package beside verl 0.9.1, mode by mode and loss by loss; `tools/compare_verl.sh` runs it."""
