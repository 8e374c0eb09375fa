"""The errors of estimates of runs that others published: only here, with the figures of docs/accuracy.md."""

SEEN = (
    "Such estimates were off on published runs: layer times by 14 % in the median and 74 % at worst, all-reduce times "
    "by 23 % and 80 % (docs/analytic.md); docs/accuracy.md has whole plans."
)
