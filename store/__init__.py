"""The one place where steps hand each other results: objects with conditional writes, manifests, leases."""

from store.objects import Conflict as Conflict
from store.objects import Store as Store
from store.objects import StoreError as StoreError
from store.objects import open_store as open_store
