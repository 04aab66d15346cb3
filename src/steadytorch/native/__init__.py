"""Code for the host that this machine's own C++ compiler makes, and what does without it.

Nothing here must be there: what uses it has a way of its own in Python, which gives the same
answers and takes longer. It is made where a search goes on anyway, and loaded everywhere else.
"""
