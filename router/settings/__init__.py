"""Every setting of an operator: flags > YAML > environment > defaults.

router_settings.py  RouterSettings, each setting declared once, and load_settings
yaml_file.py        the YAML files that operators write; any mistake in one is one sentence
"""

from router.settings.router_settings import RouterSettings, SettingsError, load_settings

__all__ = ["RouterSettings", "SettingsError", "load_settings"]
