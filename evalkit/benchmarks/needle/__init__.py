"""A needle in a haystack: is a fact found wherever it lies in a long text?"""
