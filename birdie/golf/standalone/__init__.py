"""What a submission is made of and what it weighs."""
