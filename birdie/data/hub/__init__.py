"""The challenge's published shards on the Hugging Face hub.

repository  a repository at one commit: its listing, and verified downloads of single files
catalog     the files of a repository that make up one data set
download    a published data set → the challenge's folder layout, verified and counted
"""
