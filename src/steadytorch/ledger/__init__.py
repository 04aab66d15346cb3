"""The ledger: where the time of each step went, and why steps differ in length."""
