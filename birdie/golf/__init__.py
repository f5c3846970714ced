"""The challenge: birdie as one file, submissions, the bytes of the code, the audit of the rules."""
