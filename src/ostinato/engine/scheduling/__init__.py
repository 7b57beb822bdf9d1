"""Requests from arrival to the steps that compute them: which run, in which pages, with which tokens."""
