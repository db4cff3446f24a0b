"""Kernel log lines in the forms of the field, written for the project."""

from __future__ import annotations

# line -> (address, code, subcode, cause, verdict)
Expected = tuple[str | None, int, str | None, int | None, str]

ONE_LINE: dict[str, Expected] = {
    "[ 4100.250001] NVRM: Xid (PCI:0000:3b:00): 13, pid=812, name=train, Graphics Exception": (
        "0000:3b:00.0", 13, None, None, "healthy"),
    "NVRM: Xid (0000:05:00): 31, Ch 00000012, engmask 00000101, intr 10000000": (
        "0000:05:00.0", 31, None, None, "healthy"),
    "Mar  4 08:00:01 node-7 kernel: [91.5] NVRM: Xid (PCI:0000:C1:00): 43, pid='<unknown>', "
    "name=<unknown>, Ch 00000008": ("0000:c1:00.0", 43, None, None, "healthy"),
    "2031-03-04T08:00:01+0200 node-7 kernel: NVRM: Xid (PCI:0000:3b:00.0): 62, pid=<n/a>, halt": (
        "0000:3b:00.0", 62, None, None, "failed"),
    "2031-03-04T08:00:01.123456Z node-7 kernel: NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_DOWN "
    "Fatal   XC0 i0 Link 09 (0x00401234 0x0 0x0)": (
        "0018:01:00.0", 149, "NETIR_LINK_DOWN fatal link 9 0x00401234", None, "draining"),
    "<4>[7.25] NVRM: Xid (PCI:0000:04:00): 145, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x1 0x2)": (
        "0000:04:00.0", 145, "RLW_REMAP nonfatal link 2 0x1", None, "suspect"),
    "<4>[7.25] NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Fatal XC0 i1 Link 00 (0x1)": (
        "0000:04:00.0", 144, "SAW_MVB fatal link 0 0x1 injected", None, "healthy"),
    "6,881,55001234,-;NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=71, Contained: CE User Channel "
    "(0x9). RST: No, D-RST: No": ("0000:01:00.0", 94, "CE User Channel (0x9)", None, "suspect"),
    "NVRM: Xid (PCI:0000:01:00): 95, pid=70, Uncontained: LTC TAG (0x2,0x0). RST: Yes": (
        "0000:01:00.0", 95, "LTC TAG (0x2,0x0)", None, "failed"),
    "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=9, name=python3, Ch 01 caused by previous Xid 149":
        ("0000:dc:00.0", 45, None, 149, "healthy"),
    "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 "
    "(Node Reboot Required)": ("0000:02:00.0", 154, "Node Reboot Required", None, "failed"),
    "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to "
    "0x0 (None)": ("0000:02:00.0", 154, "None", None, "healthy"),
    "NVRM: Xid (PCI:0000:02:00): 154, pid=1, name=x, GPU recovery action changed from 0x0 (None) "
    "to 0x3 (Drain P2P)": ("0000:02:00.0", 154, "Drain P2P", None, "draining"),
    "[Tue Mar  4 08:00:01 2031] NVRM: Xid (PCI:0003:00:00): 74, pid='<unknown>', name=<unknown>, "
    "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)": (
        "0003:00:00.0", 74, "link 14, register 3 bit 16: to be diagnosed", None, "draining"),
    "[  130.456250] [   T1946] NVRM: Xid (PCI:0000:01:00): 56, pid=3, name=Xorg, CMDre 00000000": (
        "0000:01:00.0", 56, None, None, "suspect"),
    "NVRM: Xid (PCI:0000:9b:00): 120, pid=5, name=a, GSP task timeout": (
        "0000:9b:00.0", 120, None, None, "failed"),
    "NVRM: Xid (PCI:0000:a4:00): 63, pid=1, name=x, Row Remapper: New row marked for remapping, "
    "reset gpu to activate.": ("0000:a4:00.0", 63, "row remap pending", None, "healthy"),
    "NVRM: Xid (PCI:0000:a4:00): 64, Row Remapper: Remapping row failed": (
        "0000:a4:00.0", 64, "row remap", None, "draining"),
    "kern  :err   : [Tue Mar  4 08:00:01 2031] NVRM: Xid (PCI:0000:3b:00): 46, pid=1, name=x": (
        "0000:3b:00.0", 46, None, None, "failed"),
    "10.0.0.7: kern: warning: [2031-03-04T08:00:01.458Z]: NVRM: Xid (PCI:0000:48:00): 140, pid=1": (
        "0000:48:00.0", 140, None, None, "failed"),
    "NVRM: Xid 79, GPU has fallen off the bus.": (None, 79, None, None, "failed"),
    "[3.1] NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.": (
        "0000:91:00.0", 79, "without an Xid number", None, "failed"),
    "[38889.01] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 RX Short": (
        "0000:06:00.0", 20009, "nvidia-nvswitch1 link 4", None, "suspect"),
    "[38889.01] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress": (
        "0000:c1:00.0", 12028, "nvidia-nvswitch3 link 32", None, "draining"),
    '{"MESSAGE":"NVRM: Xid (PCI:0000:3b:00): 109, pid=7, name=t, Ch 00000008",'
    '"__REALTIME_TIMESTAMP":"1930000000000000"}': ("0000:3b:00.0", 109, None, None, "failed"),
}  # fmt: skip

# NVLink's own numbers: message after the Xid's address -> (subcode, verdict, action)
NVLINK: dict[str, tuple[str, str, str]] = {
    # Xid 74, by registers and bits.
    "74, pid=<n/a>, name=<unknown>, NVLink: fatal error detected on link 2": (
        "link 2", "draining", "WORKFLOW_NVLINK_ERR"),
    "74, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)": (
        "link 6, register 1 bit 16: connection", "draining", "CHECK_MECHANICALS"),
    "74, NVLink: fatal error detected on link 6(0x200000, 0x0, 0x0, 0x10000, 0x0, 0x0, 0x0)": (
        "link 6, register 1 bit 21, register 4 bit 16: signal integrity", "draining",
        "CHECK_MECHANICALS"),
    "74, NVLink: fatal error detected on link 0(0x0, 0x0, 0x0, 0x40000, 0x0, 0x0, 0x0)": (
        "link 0, register 4 bit 18: fabric reset", "draining", "RESET_GPUS_AND_NVSWITCHES"),
    "74, NVLink: non-fatal error detected on link 3(0x0, 0x0, 0x0, 0x0, 0x40000, 0x0, 0x0)": (
        "link 3, register 5 bit 18: ECC or parity", "suspect", "WORKFLOW_NVLINK_ERR"),
    "74, NVLink: non-fatal error detected on link 3(0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0)": (
        "link 3, register 5 bit 20: ECC threshold, corrected", "healthy", "IGNORE"),
    # Bits that NVIDIA does not name, or too few registers: never guessed.
    "74, NVLink: fatal error detected on link 3(0x8, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)": (
        "link 3, register 1 bit 3", "draining", "WORKFLOW_NVLINK_ERR"),
    "74, NVLink: non-fatal error detected on link 3(0x0, 0x10, 0x0, 0x0, 0x0, 0x0, 0x0)": (
        "link 3, register 2 bit 4", "suspect", "WORKFLOW_NVLINK_ERR"),
    "74, NVLink: fatal error detected on link 3(0x10000, 0x0": (
        "link 3", "draining", "WORKFLOW_NVLINK_ERR"),
    # Xid 144 to 150 of drivers before R575.
    "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000)": (
        "NETIR_LINK_EVT fatal link 8 0x004505c6 reason 4: INVESTIGATE_LINK_SI", "draining",
        "RESET_GPU"),
    "149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000 0x00000000)": (
        "NETIR_LINK_EVT fatal link 0 0x025001c6 reason 37: INVESTIGATE_PEER_DEVICE", "draining",
        "RESET_GPU"),
    "149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000)": (
        "NETIR_LINK_EVT fatal link 0 0x026001c6 reason 38: INVESTIGATE_SW_USER", "suspect",
        "IGNORE"),
    "149, NETIR_LINK_EVT Fatal XC0 i0 Link 17 (0x000625c6 0x00000000)": (
        "NETIR_LINK_EVT fatal link 17 0x000625c6: SYMPATHETIC_REPORT_SOLO", "draining",
        "RESET_GPU"),
    "149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000 0x00000000)": (
        "NETIR fatal link -1 0x000fe406: SYMPATHETIC_REPORT_SOLO", "draining", "RESET_GPU"),
    "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001 0x00000000)": (
        "NETIR_BER_EVENT nonfatal link 3 0x00086226 status 0x1: INVESTIGATE_LINK_SI_AND_CABLES",
        "suspect", "IGNORE"),
    "145, pid=9, name=py, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)": (
        "RLW_RXPIPE nonfatal link 13 0x0409a0c2 status 0x8: CONTACT_SUPPORT", "suspect", "IGNORE"),
    "145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a4c2 0x00000001 0x00000000)": (
        "RLW_RXPIPE fatal link 13 0x0409a4c2 status 0x1: CONTACT_SUPPORT", "failed", "RESET_GPU"),
    "150, MSE Degraded Fatal XC0 i0 Link -1 (0x00000000 0x00000000 0x00000000)": (
        "MSE Degraded fatal link -1 0x00000000: CONTACT_SUPPORT", "failed", "RESET_GPU"),
    # The same from R575 on.
    "149, NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x00400011 0x00000000 0x00000000)": (
        "NETIR_LINK_DOWN fatal link 8 0x00400011 reason 4: INVESTIGATE_LINK_SI", "draining",
        "RESET_GPU"),
    "145, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x00000004 0x00000004 0x00000000)": (
        "RLW_REMAP nonfatal link 2 0x00000004 status 0x4: CHECK_NVLINK_FAILURE_FLOW", "suspect",
        "XID_154_EVAL"),
    "145, RLW_REMAP Fatal XC1 i0 Link 02 (0x00000004 0x00000044 0x00000000)": (
        "RLW_REMAP fatal link 2 0x00000004 status 0x44: CONTACT_SUPPORT", "failed", "RESET_GPU"),
    "146, TLW_RX_PIPE1 Nonfatal XC0 i0 Link 03 (0x0000000b 0x00000001 0x00000000)": (
        "TLW_RX_PIPE1 nonfatal link 3 0x0000000b status 0x1: IGNORE", "healthy", "IGNORE"),
    "144, SAW_MVB Fatal XC0 i0 Link 00 (0x00000001 0x00000002 0x00000000)": (
        "SAW_MVB fatal link 0 0x00000001 status 0x2: CONTACT_SUPPORT", "failed", "RESET_GPU"),
    "145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x00000086 0x00000002 0x00000000)": (
        "RLW_RXPIPE fatal link 13 0x00000086 status 0x2: CONTACT_SUPPORT", "failed", "RESET_GPU"),
    # What the table does not name: the message's own severity, and the workflow.
    "145, RLW_REMAP Nonfatal XC1 i0 Link 02": (
        "RLW_REMAP nonfatal link 2", "suspect", "WORKFLOW_NVLINK5_ERR"),
    "145, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x00000004 0x00001004 0x00000000)": (
        "RLW_REMAP nonfatal link 2 0x00000004", "suspect", "WORKFLOW_NVLINK5_ERR"),
    "145, RLW_REMAP Fatal XC1 i0 Link 02 (0x00000004 0x00000004 0x00000000)": (
        "RLW_REMAP fatal link 2 0x00000004", "draining", "WORKFLOW_NVLINK5_ERR"),
    "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x03f001c6 0x00000000)": (
        "NETIR_LINK_EVT fatal link 8 0x03f001c6", "draining", "WORKFLOW_NVLINK5_ERR"),
    "147, SOMETHING_NEW Fatal XC0 i0 Link 08 (0x00000184 0x00000001)": (
        "SOMETHING_NEW fatal link 8 0x00000184", "draining", "WORKFLOW_NVLINK5_ERR"),
}  # fmt: skip

NOT_UNDERSTOOD = (
    "NVRM: Xid error: xyz, no number",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal",
    "NVRM: Xid (PCI:zz:00): 79, pid=1",
    "NVRM: Xid (PCI:0000:3b:00): 99999999, pid=1",
)

IRRELEVANT = (
    "[1.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.00",
    "[1.0] NVRM: GPU4 RPC history (CPU -> GSP):",
    "[1.0] EXT4-fs (md127p3): re-mounted r/w",
    "Mar  4 08:00:01 node-7 systemd[1]: Started something named xidle",
    "",
)
