"""Requests from their arrival to the steps that compute them: who runs, in which pages, with which tokens."""
