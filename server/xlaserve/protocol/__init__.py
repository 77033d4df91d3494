"""What every protocol of clients shares: requests checked, models described, calls and messages bounded.

Plain data in and out: no wire, so no gRPC and no protobuf.
"""
