"""The router: where requests go. It knows instances over HTTP only.

launch ──► settings, app
app    ──► control plane (FastAPI) and, beside it, the data plane:
           proxy ──► splitwise ──► upstream ──► instances over HTTP
                └──► instances ──► policies
"""
