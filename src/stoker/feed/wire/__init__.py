"""Messages, batches and datasets on the feed's connections, and the keys that protect them.

`protocol` has a table of all messages, `codec` the form of a batch, `dataset` what is sent so that
a data host can make batches. `crypto` decides who is let in; before that nothing is parsed.
"""
