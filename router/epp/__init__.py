"""The endpoint picker: chooses instances for a gateway such as Envoy, which sends the requests itself (ext_proc, gRPC).

picker.py    Picker: the gRPC server, with the health service that gateways use
request.py   GatewayRequest: a request that a gateway reports, and its response
messages.py  creates messages to a gateway, and reads its messages
protos.py    the fields of the messages
"""

from router.epp.picker import Picker

__all__ = ["Picker"]
