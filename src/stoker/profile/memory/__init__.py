"""What takes the memory of a profiled job, and grows in it.

`watch` measures each process while the profile runs; what grows is named in the dataset by
`growing_objects` and in the script's loop by `loop_growth`, both by the walk of `python_objects`.
`findings` says what is short, and which free fix ends it.
"""
