"""The steps between the store's formats, one file each, for both databases.

A step is never changed after a release: stores have been migrated by it. It states its tables
itself instead of importing `fulmen.store.tables`, which goes on changing. Its number is the format
it leads to, which it writes into `meta`: a Fulmen that does not know it refuses the store by that.
"""
