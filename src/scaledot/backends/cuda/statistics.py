"""What every GPU kernel writes of a row, whatever the score: the contract between the kernels.

A forward kernel fills `statistics` [PLANES, B, H, Q] float32, in the order of ROW_PLANES:

    max_logit   the largest z (before any cap); -inf: the row sees no key; NaN: its logits hold NaN
                or inf, and nothing else of the row counts
    lse         ln sum e^(logit), the learned sink included; -inf where the row sees no key
    entropy     of the probabilities in nats, the sink one of the outcomes; 0 where it sees no key
    top_p       the largest probability of a key
    sum_p2      sum of squared probabilities, the sink's included
    first_p     probability of the sequence's first key, 0 where it is hidden
    count       how many keys the row sees
    mean, m2    of z over those keys; m2 is the sum of squared deviations from that mean

Where every row sees every key, m2 need be right only as a sum over the rows of a head that count
(whole_moments.py): the vitals use no other, and no row's own is given back.

Where Gram matrices give the last two for a part of the keys (moments.py), a tenth plane says of how
many keys they are so far.
"""

ROW_PLANES = (
    "max_logit",
    "lse",
    "entropy",
    "top_p",
    "sum_p2",
    "first_p",
    "count",
    "mean",
    "m2",
)
PLANES = len(ROW_PLANES)
