"""What the check finds: families of rules; the page of each rule is docs/rules/check/ID.md."""
