"""Deployment over a real network: the same sites, parcels and server rules, carried by Flower.

A ``Round`` says what is asked; ``client`` runs at a site, ``server`` where the parcels meet; ``credentials`` and
``app_folder`` write what the hosts need; ``local`` brings all of it up on one machine. Nothing here imports Flower
before it is used.
"""
