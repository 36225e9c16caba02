"""Statistics of paired scores: estimates, tests, correction for multiple tests, power, and variance between seeds.

In: numpy arrays of scores. Out: numbers. Pure functions without pandas or torch; scipy is imported where it is used.

    estimates.py      mean, standard error (clustered, stratified), interval; of averages, groups, resamples
    adjusted.py       confidence intervals of differences that are valid for few documents
    significance.py   exact McNemar test, sign-flip test of whole clusters, t test, Holm's correction
    power.py          smallest detectable difference at a power of 80 %
    seeds.py          several runs of each side: variance between seeds and between documents
    planning.py       what other numbers of seeds and documents could show
"""
