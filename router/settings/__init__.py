"""The router's settings. Flags override the YAML file, the file the environment, and the environment the defaults.

router_settings.py   RouterSettings: each setting with its default, its key and its valid values
sources.py           load_settings: reads flags, the YAML file and the environment
flags.py             FlagParser: parses a command line
yaml_file.py         read_yaml: reads an operator's YAML file
secret_file.py       read_token, read_keys: read the files with the admin token and with the API keys
tls_files.py         load_certificate, read_authorities: read files with certificates and keys
served_certificate.py  ServedCertificate: the certificate of the router's port, loaded again when its files change
"""

from router.settings.flags import FlagParser, parse_port, parse_url
from router.settings.router_settings import ROUTER_GONE_SECONDS, RouterSettings, SettingsError
from router.settings.secret_file import PRIORITIES, ApiKey, parse_priority, read_keys, read_token, stamp_file
from router.settings.served_certificate import ServedCertificate
from router.settings.sources import find_trace_receiver, load_settings, make_parser
from router.settings.tls_files import CERTIFICATE_REMEDY, is_certificate_refused, load_certificate, read_authorities
from router.settings.yaml_file import YamlFileError, read_yaml

__all__ = [
    "CERTIFICATE_REMEDY",
    "PRIORITIES",
    "ROUTER_GONE_SECONDS",
    "ApiKey",
    "FlagParser",
    "RouterSettings",
    "ServedCertificate",
    "SettingsError",
    "YamlFileError",
    "find_trace_receiver",
    "is_certificate_refused",
    "load_certificate",
    "load_settings",
    "make_parser",
    "parse_port",
    "parse_priority",
    "parse_url",
    "read_authorities",
    "read_keys",
    "read_token",
    "read_yaml",
    "stamp_file",
]
