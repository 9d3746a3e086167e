"""Where attention is found: one file a place. A probe looks, and changes nothing unless asked to.

`hub` knows the watches that listen and puts the probes in place for the first of them, `patch`
swaps a function and swaps it back (`holders` finds where the program keeps it), `frames` keeps the
watch out of tracebacks and warnings, `place` says which module is running. The rest are the places:
`sdpa` (torch's function), `multihead` (torch's modules), `hugging_face` (transformers' registry),
`diffusers` (its dispatcher), `own` (scaledot's functions), `over_ranks` (those of several ranks),
`flash` (flash_attn's functions), `flex` (FlexAttention), and `by_hand`, which can only name what it
finds. `compiled`, `in_graph`, `multihead_compiled` and `hugging_face_compiled` are what of them is
left inside torch.compile, `sharded` what DTensors need, `replacing` puts scaledot's attention in
the place of theirs.
"""
