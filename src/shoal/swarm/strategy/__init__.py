"""Strategies of giving and taking, and the queues between peers and steps.

choice      own groups to share, offers to take, weight of the latter (pure)
sharing     queue of own groups to share
pending     offers that wait for verification, by author
ready_pool  verified offers that wait for a step, by author
"""
