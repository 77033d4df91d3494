"""Requests checked, models described, outcomes counted: the part of every protocol that is plain data.

Neither gRPC nor protobuf is imported here.
"""
