"""Statistics of paired scores: estimates with their errors, tests, correction, power, and the spread between seeds.

In: numpy arrays of scores. Out: numbers. Pure functions without pandas or torch; scipy is imported where it is used.

    estimates.py      mean, standard error (clustered, stratified), interval; of averages, groups, resamples
    adjusted.py       intervals of differences that hold for few documents too
    significance.py   exact McNemar, sign flips of whole clusters, t, Holm
    power.py          the smallest difference that would be found four times in five
    seeds.py          several runs of each side: the spread between them and that between documents
"""
