"""From parameters to buckets, and from buckets to averages in the background of a backward pass.

`reducer.py` tells the story; the other files are its characters.
"""
